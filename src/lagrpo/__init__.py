"""On-policy and off-policy GRPO and its family on verifiable rewards."""
