"""`python -m services.target`: the target as a plain process."""

from services.entry import main
from services.target.main import run

main("target", run)
