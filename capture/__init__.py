"""A network of a known family becomes one `torch.export` program. See README, \"How it is built\"."""
