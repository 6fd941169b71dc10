"""The store for tests that wait for no end of patience: what a busy machine keeps waiting is not sent again."""

from __future__ import annotations

from services.settings import StoreSettings

PATIENCE_S = 30.0
PATIENT = StoreSettings(socket_timeout_s=PATIENCE_S, deadline_s=2 * PATIENCE_S)
