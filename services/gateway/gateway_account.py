"""A gateway's own metrics beside those of the others: each has its label, so a scrape of any gateway shows them all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from services.accounts import Account

LABEL = "gateway"


class GatewayCollector(Collector):
    """The families of `own`, and those that other gateways' accounts hold."""

    def __init__(self, own: CollectorRegistry, gateway_id: str) -> None:
        self._own, self.id = own, gateway_id
        self.accounts: Sequence[Account] = ()

    def account(self) -> Account:
        """This gateway's."""
        return Account(kind="gateway", id=self.id, families=list(_plain(self._own)))

    def collect(self) -> Iterator[Metric]:
        """Each family once, every sample with its gateway's label. Gauges of gateways that have ended are left out."""
        families: dict[str, Metric] = {}
        others = [each for each in self.accounts if each.kind == "gateway" and each.id != self.id]
        for account in (self.account(), *others):
            for name, text, kind, samples in account.families:
                if kind == "gauge" and not account.is_live():
                    continue
                family = families.setdefault(name, Metric(name, text, kind))
                for sample, labels, value in samples:
                    family.add_sample(sample, {**labels, LABEL: account.id}, value)
        yield from families.values()


def _plain(registry: CollectorRegistry) -> Iterator[list[Any]]:
    for family in registry.collect():
        samples = [
            [one.name, dict(one.labels), one.value] for one in family.samples if not one.name.endswith("_created")
        ]
        yield [family.name, family.documentation, family.type, samples]
