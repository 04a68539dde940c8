"""Published figures of the peers, and how they are carried over to another machine.

They were measured with ED-Batch's released code on a machine of the kind used here (two cores,
Zen 5, AVX-512): instances per second of (DyNet, DyNet with predefined cells, ED-Batch), the loss of
a minibatch, one thread unless stated. Absolute numbers hold there only. A figure is carried over
by the speed of XLA's matrix product, 256×512×2048, there and here; and the fraction of its own
matrix product that each peer reached compares without that step.
"""

Figures = dict[tuple[int, int], tuple[float | None, float | None, float | None]]
PEERS = ("DyNet", "DyNet cells", "ED-Batch")

INFERENCE: dict[str, Figures] = {  # by workload, then by (batch, hidden)
    "treelstm": {
        (1, 64): (None, None, 12500),
        (1, 256): (None, None, 2427),
        (1, 512): (None, None, 378),
        (8, 64): (None, None, 16064),
        (8, 256): (None, None, 3346),
        (8, 512): (None, None, 698),
        (64, 128): (7109, 8549, 8303),
        (64, 256): (3858, 3788, 4128),
        (64, 512): (1343, 1060, 1250),
        (256, 128): (5868, 9484, 8417),
        (256, 256): (3693, 4283, 4360),
        (256, 512): (1368, 1399, 1449),
    },
    "lattice_lstm": {
        (1, 64): (None, None, 5525),
        (1, 256): (None, None, 1046),
        (1, 512): (None, None, 219),
        (64, 128): (2315, 3569, 4203),
        (64, 256): (1215, 1412, 1736),
        (64, 512): (284, 282, 460),
        (256, 128): (2321, 4209, 3896),
        (256, 256): (1243, 1731, 1972),
        (256, 512): (397, 442, 641),
    },
    "bilstm": {
        (1, 64): (None, None, 3922),
        (1, 256): (None, None, 404),
        (1, 512): (None, None, 39),
        (64, 128): (2115, 2752, 2772),
        (64, 256): (821, 873, 1114),
        (64, 512): (197, 211, 296),
        (256, 128): (1827, 3531, 3347),
        (256, 256): (825, 1297, 1338),
        (256, 512): (330, 356, 404),
    },
    "treegru": {(64, 256): (None, 4485, 4724)},
    "treelstm2": {(64, 256): (None, 3074, 3731)},
    "lattice_gru": {(64, 256): (None, 999, 1882)},
    "nmt": {(64, 256): (None, 1360, 2124)},
    "bilstm_chars": {(64, 256): (None, 556, 578)},
    "mvrnn": {(64, 64): (None, 3475, 3642), (64, 128): (None, 759, 770)},
}
TWO_THREADS: dict[str, Figures] = {
    "treelstm": {
        (64, 256): (None, 4656, 4914),
        (64, 512): (None, 1240, 1507),
        (256, 256): (None, 5343, 5681),
        (256, 512): (None, 1947, 2049),
    },
    "lattice_lstm": {
        (64, 256): (None, 1578, 1799),
        (64, 512): (None, 335, 547),
        (256, 256): (None, 1965, 2211),
        (256, 512): (None, 659, 917),
    },
    "bilstm": {
        (64, 256): (None, 827, 1026),
        (64, 512): (None, 267, 407),
        (256, 256): (None, 1569, 1570),
        (256, 512): (None, 520, 658),
    },
}
TRAINING: dict[str, Figures] = {  # one thread; ED-Batch has no backward pass
    "treelstm": {
        (64, 128): (3581, None, None),
        (64, 256): (1508, None, None),
        (64, 512): (486, None, None),
        (256, 128): (2955, None, None),
        (256, 256): (1491, None, None),
        (256, 512): (530, None, None),
    },
    "lattice_lstm": {
        (64, 128): (1120, None, None),
        (64, 256): (437, None, None),
        (64, 512): (71, None, None),
    },
    "bilstm": {
        (64, 128): (903, None, None),
        (64, 256): (301, None, None),
        (64, 512): (70, None, None),
    },
}
BATCHES = {  # batches at 64 instances: agenda, depth, then FSM base, max, sort, sufficient
    "treelstm": (78, 78, 30, 30, 30, 30),
    "treelstm2": (174, 98, 63, 82, 40, 42),
    "bilstm": (154, 208, 154, 154, 154, 154),
    "lattice_lstm": (624, 1233, 349, 368, 308, 302),
    "lattice_gru": (624, 1233, 349, 344, 311, 302),
    "nmt": (472, 556, 472, 472, 472, None),
}
LEARNING_MS = {  # to learn an FSM
    "treelstm": "12–17",
    "bilstm": "50–61",
    "treelstm2": "155–180",
    "lattice_gru": "460–680",
    "lattice_lstm": "760–960",
}
FLOP = {  # operations of the products of an instance, in units of the square of the hidden size
    "treelstm": 405,
    "treelstm2": 405,
    "bilstm": 1564,
    "lattice_lstm": 1064,
    "lattice_gru": 798,  # as many arcs with three quarters of the products
}
XLA_PRODUCT = {1: 266e9, 2: 470e9}  # by threads
PEERS_PRODUCT = {1: 248e9, 2: 378e9}
