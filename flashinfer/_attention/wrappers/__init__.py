"""The wrapper classes: plan a batch, then run its layers."""
