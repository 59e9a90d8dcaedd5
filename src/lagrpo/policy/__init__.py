"""The policy π: loading, group attention, log-probs of completion tokens, and the learner's step."""
