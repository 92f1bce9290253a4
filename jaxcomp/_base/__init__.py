"""What every other wing stands on: types, trees, dtypes, checks of arguments."""
