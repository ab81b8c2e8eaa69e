"""Training: the recursion over draft depth, losses, jitted steps, validation.

task.py        what is trained, and a batch run through the frozen target
step.py        parameters, optimizer, and the jitted steps of a draft and of a target
recursion.py   the rollout of EAGLE-2, HASS and PosS, depth by depth
chains.py      the rollout of EAGLE-3, chain by chain
losses.py      losses of draft and target
validation.py  losses and acceptance on held-out text
"""
