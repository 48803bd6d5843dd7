"""Ledgers: the record of every release from one client's data set, and folders of them."""

from fedsynth.privacy.ledger.ledger import Ledger as Ledger
from fedsynth.privacy.ledger.ledger import read_ledger as read_ledger
