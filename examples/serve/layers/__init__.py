"""What models are made of: each layer has its weights and says what a request leaves in it."""
