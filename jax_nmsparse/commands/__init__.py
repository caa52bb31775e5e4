"""The subcommands of ``python -m jax_nmsparse``.

A module each, with HELP, ``add_arguments(parser)`` and ``run(arguments)``, which returns the exit code.
"""
