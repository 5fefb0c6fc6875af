"""See README, \"How it is built\"."""
