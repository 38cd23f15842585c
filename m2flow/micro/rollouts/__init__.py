"""Response lengths, and which instance generates which sample: the part of a step that its longest answers decide.

    lengths    how long answers are: of a trace or a run (`measured`), by formula (`parametric`); `survival`, `correlation`
    decode     how long an instance takes for them
    bounds     how long any schedule must take

Pure functions of numbers, no engine and no clock: the planner, the simulator and `m2flow simulate rollout` share them.
"""
