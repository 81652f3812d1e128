"""The functions: attention of one request, of block tables, and merging of states."""
