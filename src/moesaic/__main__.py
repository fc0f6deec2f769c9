"""`python -m moesaic` is the same as `moesaic`."""

from moesaic.cli.main import run

if __name__ == "__main__":
    run()
