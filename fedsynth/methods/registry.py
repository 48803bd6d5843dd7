"""The list of built-in methods, one line each.

Every other list of methods is derived from it. A method's name is its class name in lower case,
with a hyphen before a word that follows capitals: `FedDM` is "feddm", and `FedFMLite` is
"fedfm-lite". `fedsynth.methods` parses the file's text, so that listing the methods does not import
them. Type checkers read the names from this file too.
"""

from fedsynth.methods.ccvr import CCVR as CCVR
from fedsynth.methods.dense import Dense as Dense
from fedsynth.methods.fedaf import FedAF as FedAF
from fedsynth.methods.fedavg import FedAvg as FedAvg
from fedsynth.methods.fedavg import FedAvgM as FedAvgM
from fedsynth.methods.fedavg import FedProx as FedProx
from fedsynth.methods.fedavg import Solo as Solo
from fedsynth.methods.fedbe import FedBE as FedBE
from fedsynth.methods.fedbn import FedBN as FedBN
from fedsynth.methods.fedcvae import FedCVAEEns as FedCVAEEns
from fedsynth.methods.fedcvae import FedCVAEKd as FedCVAEKd
from fedsynth.methods.feddc import FedDC as FedDC
from fedsynth.methods.feddf import FedDF as FedDF
from fedsynth.methods.feddm import FedDM as FedDM
from fedsynth.methods.feddyn import FedDyn as FedDyn
from fedsynth.methods.fedfa_plus import FedFAPlus as FedFAPlus
from fedsynth.methods.fedfm import FedFM as FedFM
from fedsynth.methods.fedfm import FedFMLite as FedFMLite
from fedsynth.methods.fedgen import FedGen as FedGen
from fedsynth.methods.fedgkd import FedGKD as FedGKD
from fedsynth.methods.fedharmo import FedHarmo as FedHarmo
from fedsynth.methods.fedhydra import FedHydra as FedHydra
from fedsynth.methods.fedkf import FedKF as FedKF
from fedsynth.methods.fedmgda_plus import FedMGDAPlus as FedMGDAPlus
from fedsynth.methods.fedmix import FedMix as FedMix
from fedsynth.methods.fednova import FedNova as FedNova
from fedsynth.methods.fedrobust import FedRobust as FedRobust
from fedsynth.methods.fedsam import FedSAM as FedSAM
from fedsynth.methods.fedsr import FedSR as FedSR
from fedsynth.methods.fedstats import FedStats as FedStats
from fedsynth.methods.fedsum import FedSum as FedSum
from fedsynth.methods.fpl import FPL as FPL
from fedsynth.methods.moon import Moon as Moon
from fedsynth.methods.qffl import QFFL as QFFL
from fedsynth.methods.real import Real as Real
from fedsynth.methods.scaffold import Scaffold as Scaffold
