"""The table: every pairing, in the order of the page. A row is added to the list of its peer."""

from with_areal import OF_AREAL
from with_rlax import OF_RLAX
from with_skyrl import OF_SKYRL
from with_trinity import OF_TRINITY
from with_trl import OF_TRL
from with_verl import OF_VERL

PAIRINGS = [*OF_TRL, *OF_VERL, *OF_TRINITY, *OF_SKYRL, *OF_AREAL, *OF_RLAX]
