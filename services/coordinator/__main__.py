"""`python -m services.coordinator`: the coordinator as a plain process."""

from services.coordinator.main import run
from services.entry import main

main("coordinator", run)
