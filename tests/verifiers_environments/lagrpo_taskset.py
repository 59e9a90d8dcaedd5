"""Tasksets of verifiers.v1, for the tests marked verifiers: they run in the other Python."""

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Config(vf.TaskConfig):
    tool: vf.ToolsetConfig = vf.ToolsetConfig()


class Adder(vf.Toolset[vf.ToolsetConfig]):
    @vf.tool
    async def add(self, x: int, y: int) -> int:
        """Add two numbers."""
        return x + y


class Sum(vf.Task[Data, vf.State, Config]):
    @vf.reward(weight=1.0)
    async def correct(self, trace: vf.Trace) -> float:
        if trace.last_reply == "broken":
            raise RuntimeError("no score today")
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) < 4)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class ToolSum(Sum):
    @classmethod
    def toolsets(cls, config: Config):
        return [Adder(config.tool)]


class TasksetConfig(vf.TasksetConfig):
    rows: int = 10
    tools: bool = False


class Sums(vf.Taskset[Sum, TasksetConfig]):
    def load(self):
        for n in range(self.config.rows):
            data = Data(prompt=f"What is {n} + 1?", system_prompt="Be brief.", answer=str(n + 1))
            yield (ToolSum if self.config.tools else Sum)(data)


__all__ = ["Sums"]

if __name__ == "__main__":
    Adder.run()
