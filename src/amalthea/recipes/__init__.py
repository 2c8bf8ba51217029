"""Recipes: plain functions that return a `RunConfig`."""
