"""Tests; a package, so that processes that tests start can import from it."""
