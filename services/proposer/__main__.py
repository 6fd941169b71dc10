"""`python -m services.proposer`: the proposer as a plain process."""

from services.entry import main
from services.proposer.main import run

main("proposer", run)
