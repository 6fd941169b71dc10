"""SeqMTP Serve: disaggregated, exactly-once speculative serving for models with multi-token-prediction modules."""

__version__ = "0.1.0"
