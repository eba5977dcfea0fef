"""What a user can mend, in one place: a leaf that every module may import."""


class UserError(Exception):
    """Something the user can mend; the message says what was expected, what came, and the fix.

    Modules derive their own errors from it and from a built-in one. A command ends with its message
    on one line and exit status 2.
    """
