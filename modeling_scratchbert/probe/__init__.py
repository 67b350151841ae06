"""`probe.json`, beside the weights of a saved model: a digest of each tensor, and what the model computes.

`save_pretrained` writes it (`recording`), and `from_pretrained(verify=True)` compares the loaded model with it
(`comparison`). It shows damage and wrong loading, not forgery: whoever can change the weights can change the file as
well. This package is installed, and not copied into the folder of a saved model.
"""
