"""`python -m tests.services.fake_roles.proposer`."""

from tests.services.fake_roles.sleeper import main

if __name__ == "__main__":
    main("proposer")
