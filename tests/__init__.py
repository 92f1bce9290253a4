"""The tests, as a package: they import `tests.helpers` from wherever pytest is started."""
