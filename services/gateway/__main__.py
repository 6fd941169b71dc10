"""`python -m services.gateway`: the gateway as a plain process."""

from services.entry import main
from services.gateway.main import run

main("gateway", run)
