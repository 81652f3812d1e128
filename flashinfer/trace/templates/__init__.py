"""One module of templates per family of operations; import the family you need."""
