"""The policy π: loading, shared-prefix attention, log-probs of completion tokens, and the learner's step."""
