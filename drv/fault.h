/* SPDX-License-Identifier: GPL-2.0-only */
/*
 * Fault points: in a build with UGDS_DRV_FAULTS=1 each step of a set-up can be
 * made to fail once, by its name:
 *	echo host_pin >/sys/module/ugds_drv/parameters/fault
 * `fault_points` beside it lists them; `fault` reads as empty once it was met.
 */
#ifndef UGDS_DRV_FAULT_H
#define UGDS_DRV_FAULT_H

#ifdef UGDS_DRV_FAULTS
/* -EUCLEAN, which nothing else of the module's gives, where it was asked for */
int ugds_fault(const char *point);
#else
static inline int ugds_fault(const char *point)
{
	return 0;
}
#endif

#endif
