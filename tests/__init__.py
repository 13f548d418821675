"""Tests, one folder per room of the package; helpers live in tests/support."""
