"""A plan of attention is made from options, requests, the choice of a kernel and workspaces."""
