"""Mixtures of experts on Hopper: routing, maps of rows, the grouped products and their sum."""
