"""Starts the sides of a benchmark, lets one run at a time, and compares them."""
