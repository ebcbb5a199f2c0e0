"""Names of the remote-control commands of workers. Celery's command line imports no more than this.

So it is as quick with Batchery as without.
"""

#: Asks for the figures.
FIGURES = "batchery"

#: Reload a model.
RELOAD = "batchery_reload"
