"""Predicts a study's own arms at world sizes that it did not run, with bounds.

measured     what the study measured of every arm, world by world              Arm, World
loads        what a rank has to do at a world size, from the placement         RankLoads, Exchanged
laws         a law of two terms, fitted to measured seconds                    Law
fitted       the laws of one arm, and its phases at any world size             FittedArm
bounds       how far predictions of held-out worlds and repeated runs were off Errors
links        laws of exchanges, from a calibration or from the study           Links
reading      what was measured, from a `Study`                                 measured
prediction   all of it together                                                StepPrediction
answers      predictions and recommendations as plain values
strategy_map the fastest arm over ranks and link speed
choice       which arm to use at a world size, why, and how sure               Choice
"""
