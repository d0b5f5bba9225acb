"""Published figures of two clusters of GPUs, and what was measured on one, for the cost model.

Whatever is computed from them is modelled: nobody who wrote this had 1,024 GPUs. Each figure has
its source; those that were not compared with it say so.
"""

from dataclasses import dataclass

from ddp_teach.cost_model import Network

GPUS_PER_SERVER = 8

NCCL = "NCCL, src/graph/tuning.cc, commit 01afd20, table hwLat: ring, protocol Simple, "
UNCHECKED = " (quoted from memory: compare with the paper before you rely on it)"


@dataclass(frozen=True)
class Cluster:
    """Servers of 8 GPUs: the links ``within`` a server, and the network ``between`` servers."""

    within: Network
    between: Network

    def network(self, ranks: int) -> Network:
        """What a ring over so many GPUs sees.

        It enters and leaves every server once: seven of eight hops stay inside. So latencies add up
        in this proportion, as in NCCL's own model, and the slower of the links sets the pace.
        """
        if ranks <= GPUS_PER_SERVER:
            return self.within
        inside = (GPUS_PER_SERVER - 1) * self.within.alpha
        alpha = (inside + self.between.alpha) / GPUS_PER_SERVER
        return Network(alpha, min(self.within.beta, self.between.beta))


CLUSTERS = {
    "V100, 100 Gb/s a server": Cluster(
        Network(
            alpha=3.4e-6,
            beta=6 * 25e9,
            source=f"{NCCL}NVLink; bandwidth: NVIDIA, page on NVLink: Tesla V100, six links of "
            "25 GB/s in each direction",
        ),
        Network(
            alpha=9.6e-6,
            beta=100e9 / 8,
            source=f"{NCCL}network; bandwidth: one ConnectX-4 card of 100 Gb/s for 8 GPUs, as in "
            f"Li et al., VLDB 2020, section 5{UNCHECKED}",
        ),
    ),
    "H100, 400 Gb/s a GPU": Cluster(
        Network(
            alpha=3.4e-6,
            beta=900e9 / 2,
            source=f"{NCCL}NVLink; bandwidth: NVIDIA, H100: 900 GB/s, both directions together",
        ),
        # Eight cards: eight rings side by side, each with an eighth of the bytes.
        Network(
            alpha=9.6e-6,
            beta=8 * 400e9 / 8,
            source=f"{NCCL}network; bandwidth: NVIDIA, DGX BasePOD reference architecture: eight "
            "ConnectX-7 ports of 400 Gb/s in a DGX H100",
        ),
    ),
}


@dataclass(frozen=True)
class Reported:
    """What others measured: on so many ``ranks`` this scaling ``efficiency``."""

    ranks: int
    efficiency: float
    source: str


LI_2020 = Reported(
    256,
    0.5,
    "Li et al., PyTorch Distributed, VLDB 2020, section 5.3: ResNet50 over NCCL on 256 GPUs, each "
    f"iteration 100 % slower than on one{UNCHECKED}",
)
