"""Instruments on public functions: the decorator, the log, dumps and their replay."""
