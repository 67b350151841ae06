"""The training loop and everything around it, for the commands that train."""
