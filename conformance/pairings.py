"""The table: every pairing, in the order of the page. A row is added to the list of its peer."""

from with_areal import AREAL_PAIRINGS
from with_rlax import RLAX_PAIRINGS
from with_skyrl import SKYRL_PAIRINGS
from with_slime import SLIME_PAIRINGS
from with_trinity import TRINITY_PAIRINGS
from with_trl import TRL_PAIRINGS
from with_verl import VERL_PAIRINGS

PAIRINGS = [
    *TRL_PAIRINGS,
    *VERL_PAIRINGS,
    *TRINITY_PAIRINGS,
    *SKYRL_PAIRINGS,
    *AREAL_PAIRINGS,
    *RLAX_PAIRINGS,
    *SLIME_PAIRINGS,
]
