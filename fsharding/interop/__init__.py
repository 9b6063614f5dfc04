"""Models and weights of others: modules of torch, Hugging Face."""
