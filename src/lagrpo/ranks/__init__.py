"""Several processes of one run: torchrun starts them, torch.distributed carries what they tell each other."""
