// SPDX-License-Identifier: GPL-2.0-only
/*
 * Stopping a controller, and keeping it stopped.
 *
 * The rings are in user space, so no command can be waited for here. What ends
 * DMA at once is the function's bus mastering; what makes the controller forget
 * its commands, so that bus mastering can come back, is CC.EN=0 with CSTS.RDY=0
 * (NVMe Base 2.0, 3.5.4 and 3.7.2), or a reset of the function.
 */
#include <linux/delay.h>
#include <linux/io-64-nonatomic-lo-hi.h>
#include <linux/jiffies.h>

#include "internal.h"

#define REG_CAP		0x00
#define REG_CC		0x14
#define REG_CSTS	0x1c
#define CAP_TO(cap)	(((cap) >> 24) & 0xff)
#define CC_EN		BIT(0)
#define CSTS_RDY	BIT(0)

/*
 * No memory request of the function's is made from here on. The read of its
 * configuration space is answered behind what it had posted before, so that has
 * left for memory, too (PCI Express Base, 2.4.1).
 */
static void master_off(struct ugds_device *ud)
{
	u16 command;

	lockdep_assert_held(&ud->command_lock);
	pci_clear_master(ud->pdev);
	pci_read_config_word(ud->pdev, PCI_COMMAND, &command);
}

static void disable(struct ugds_device *ud)
{
	u32 cc = readl(ud->registers + REG_CC);

	if (cc == ~0U)
		return;	/* not there any more */
	if (cc & CC_EN)
		writel(cc & ~CC_EN, ud->registers + REG_CC);
	readl(ud->registers + REG_CSTS);
}

/*
 * Ends all DMA now. The controller is told first, so that it ends its commands
 * for that reason, and not because memory does not answer: QEMU's never lets go
 * of a command that met bus mastering off.
 */
static void end_dma(struct ugds_device *ud)
{
	disable(ud);
	master_off(ud);
}

/*
 * Ends all DMA now, and says that it did. What a DMA-BUF's owner calls in the
 * end: under its reservation lock, so this waits for nobody.
 */
void ugds_wedge(struct ugds_device *ud, u32 state, u32 cause)
{
	mutex_lock(&ud->command_lock);
	end_dma(ud);
	spin_lock(&ud->state_lock);
	ud->generation++;
	if (ud->state != UGDS_DRV_STATE_GONE) {
		ud->state = state;
		ud->cause = cause;
	}
	if (ud->event)
		ugds_signal(ud->event);
	spin_unlock(&ud->state_lock);
	mutex_unlock(&ud->command_lock);
}

/*
 * Bus mastering on, for a controller that has stopped, unless something has
 * happened since: EAGAIN, or ENODEV if nothing will come after it.
 */
int ugds_go(struct ugds_device *ud, u64 generation)
{
	int ret = 0;

	mutex_lock(&ud->command_lock);
	spin_lock(&ud->state_lock);
	if (ud->state == UGDS_DRV_STATE_GONE) {
		ret = -ENODEV;
	} else if (ud->generation != generation) {
		ret = -EAGAIN;
	} else {
		ud->state = UGDS_DRV_STATE_LIVE;
		ud->cause = UGDS_DRV_REASON_NONE;
	}
	spin_unlock(&ud->state_lock);
	if (!ret)
		pci_set_master(ud->pdev);
	mutex_unlock(&ud->command_lock);
	return ret;
}

/* True if the controller is not ready, or not there. */
static bool wait_for_disabled(struct ugds_device *ud)
{
	u64 cap = readq(ud->registers + REG_CAP);
	unsigned long deadline;
	u32 csts;

	/* CAP.TO counts half seconds. A millisecond more than the promise. */
	deadline = jiffies + msecs_to_jiffies(CAP_TO(cap) * 500 + 1) + 1;
	for (;;) {
		bool late = time_after(jiffies, deadline);

		csts = readl(ud->registers + REG_CSTS);
		if (csts == ~0U || !(csts & CSTS_RDY))
			return true;
		if (late)
			return false;
		usleep_range(100, 1000);
	}
}

static int reset_function(struct ugds_device *ud)
{
	int ret;

	/*
	 * What is saved has bus mastering off, so that restoring it cannot turn
	 * on what an owner's call turned off meanwhile.
	 */
	ret = pci_save_state(ud->pdev);
	if (ret)
		return ret;
	ret = pcie_reset_flr(ud->pdev, PCI_RESET_DO_RESET);
	pci_restore_state(ud->pdev);
	return ret;
}

/*
 * Makes the controller stop, with bus mastering off and left so. 0 if it is
 * known to have: `method` says by what. `generation` is of what had happened
 * when this began.
 */
int ugds_stop(struct ugds_device *ud, bool with_flr, u32 *method,
	      u64 *generation)
{
	bool stopped;

	lockdep_assert_held(&ud->lock);
	*method = 0;
	mutex_lock(&ud->command_lock);
	end_dma(ud);
	*generation = ud->generation;
	mutex_unlock(&ud->command_lock);
	stopped = wait_for_disabled(ud);
	if (stopped)
		*method = UGDS_DRV_RESET_DISABLE;
	if ((!stopped || with_flr) && ud->flr && !reset_function(ud)) {
		stopped = true;
		*method = UGDS_DRV_RESET_FLR;
	}
	if (stopped)
		return 0;
	dev_err(&ud->dev, "the controller did not stop within CAP.TO\n");
	return -EIO;
}

int ugds_request_reset(struct ugds_file *file, void *request, u32 *reason,
		       struct ugds_mapping **made)
{
	struct ugds_drv_reset *reset = request;
	struct ugds_device *ud = file->ud;
	u64 generation;
	int ret;

	if (reset->reserved) {
		*reason = UGDS_DRV_REASON_ARGUMENT;
		return -EINVAL;
	}
	reset->stopped = 0;
	reset->method = 0;
	ret = ugds_stop(ud, reset->flags & UGDS_DRV_RESET_WITH_FLR,
			&reset->method, &generation);
	if (!ret)
		ret = ugds_fault("reset_stop");
	if (ret) {
		ugds_wedge(ud, UGDS_DRV_STATE_WEDGED,
			   UGDS_DRV_REASON_NOT_STOPPED);
		*reason = UGDS_DRV_REASON_NOT_STOPPED;
		return ret;
	}
	reset->stopped = 1;
	/* What was unmapped since the last time has to be unreachable, too. */
	ugds_forget_translations(ud);
	ret = ugds_go(ud, generation);
	if (ret)
		*reason = ret == -ENODEV ? UGDS_DRV_REASON_REMOVED :
					   UGDS_DRV_REASON_AGAIN;
	return ret;
}
