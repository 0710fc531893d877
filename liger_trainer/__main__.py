"""`python -m liger_trainer`, which launchers such as torchrun and accelerate can start."""

from .cli.app import main

if __name__ == "__main__":
    from .run.launch import given_by_launcher

    main(given_by_launcher())
