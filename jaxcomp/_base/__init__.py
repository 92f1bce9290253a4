"""Types, trees, dtypes and checks of arguments, for all other packages."""
