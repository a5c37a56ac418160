"""Does an output compute what it should? What runtimes of formats implement for it, and how results are compared."""
