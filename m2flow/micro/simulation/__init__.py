"""A run on a virtual clock: the scheduler that the controller runs, and workers that only take as long as real ones would.

program   a flow's calls, and where Python waits, as a run would meet them
machines  how long each worker takes for what: the costs, seat by seat
decoding  continuous batching on one worker, from finish to finish
worker    a virtual worker: tasks in order, generation beside them
rows      when which rows are where
drawn     how long each sample is
usage     what each device does when, and why it does nothing
run       the loop: program, scheduler, workers, clock
report    what it came to, against the bounds
"""
