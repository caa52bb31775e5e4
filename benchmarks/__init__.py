"""Benchmarks: ``python -m benchmarks.run --suite decode``; recorded runs are under results/."""
