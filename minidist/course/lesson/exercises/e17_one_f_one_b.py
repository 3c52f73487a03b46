"""Lesson 17: 1F1B for every number of stages and micro-batches."""

from minidist.course.lesson.exercises.e16_gpipe import as_good_as, exercise

EXERCISES = [exercise("17.one_f_one_b", as_good_as("1f1b", lives=True))]
