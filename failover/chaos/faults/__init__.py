"""All faults by their names: one class in a file of its own, and one line here."""

from __future__ import annotations

from failover.chaos.faults.abort_in_200 import AbortIn200
from failover.chaos.faults.bandwidth import Bandwidth
from failover.chaos.faults.base import Fault
from failover.chaos.faults.clock_skew import ClockSkew
from failover.chaos.faults.cut import Cut
from failover.chaos.faults.delay import Delay
from failover.chaos.faults.die_at_token import DieAtToken
from failover.chaos.faults.disk_full import DiskFull
from failover.chaos.faults.drain import Drain
from failover.chaos.faults.error_400 import Error400
from failover.chaos.faults.error_500 import Error500
from failover.chaos.faults.error_mid_stream import ErrorMidStream
from failover.chaos.faults.flush import Flush
from failover.chaos.faults.freeze import Freeze
from failover.chaos.faults.kill import Kill
from failover.chaos.faults.leak import Leak
from failover.chaos.faults.lying_health import LyingHealth
from failover.chaos.faults.partial_kv import PartialKv
from failover.chaos.faults.poison_prompt import PoisonPrompt
from failover.chaos.faults.redis_failover import RedisFailover
from failover.chaos.faults.redis_restart import RedisRestart
from failover.chaos.faults.refuse import Refuse
from failover.chaos.faults.reset import Reset
from failover.chaos.faults.restart import Restart
from failover.chaos.faults.silent import Silent
from failover.chaos.faults.slow_scheduler import SlowScheduler
from failover.chaos.faults.stop import Stop
from failover.chaos.faults.wrong_page_size import WrongPageSize

FAULTS: dict[str, type[Fault]] = {
    # processes
    "kill": Kill,
    "freeze": Freeze,
    "restart": Restart,
    "stop": Stop,
    "wrong_page_size": WrongPageSize,
    "clock_skew": ClockSkew,
    "disk_full": DiskFull,
    "drain": Drain,
    "flush": Flush,
    "redis_restart": RedisRestart,
    "redis_failover": RedisFailover,
    # links
    "delay": Delay,
    "bandwidth": Bandwidth,
    "silent": Silent,
    "refuse": Refuse,
    "cut": Cut,
    "reset": Reset,
    # inside emulated engines
    "error_500": Error500,
    "error_400": Error400,
    "abort_in_200": AbortIn200,
    "error_mid_stream": ErrorMidStream,
    "die_at_token": DieAtToken,
    "partial_kv": PartialKv,
    "lying_health": LyingHealth,
    "poison_prompt": PoisonPrompt,
    "leak": Leak,
    "slow_scheduler": SlowScheduler,
}
