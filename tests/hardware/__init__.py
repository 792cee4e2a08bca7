"""Tests on GPUs."""
