"""Ledgers, which record every release from a client's data set, and folders of ledgers."""

from fedsynth.privacy.ledger.ledger import Ledger as Ledger
from fedsynth.privacy.ledger.ledger import read_ledger as read_ledger
