"""Predicts steps at world sizes that nobody ran: exact work of every rank, times measured rates.

networks     layers of the papers' networks, written from the real models       Network
work         operations, traffic and memory of every rank, from the placement   Setup, Work
laws         a law of two terms, and how exchanges grow with the ranks          Law, Seconds
loads        what each phase's law is multiplied with                           RankLoads
arms         what a study measured of every arm, world by world                 Arm, World
reading      the same, from a `Study`                                           measured
links        laws of exchanges, fitted to those of a study                      Links
fitted       the laws of one arm, and its phases at any world size              FittedArm
bounds       how far predictions of held-out worlds and repeated runs were off  Errors
prediction   all of it together                                                 StepPrediction
machine      rates of a machine, for networks that nobody ran                   Machine
choice       which arm to use at a world size, why, and how sure                Choice
"""
