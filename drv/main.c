// SPDX-License-Identifier: GPL-2.0-only
/*
 * ugds_drv: the privileged part of uGDS. It gives an NVMe controller to one
 * program at a time, sets up what that cannot set up itself, and takes it all
 * back. This file: the driver, and a controller's life from probe to removal.
 *
 * It binds to no device by itself. An administrator names one in
 * driver_override.
 */
#include <linux/dma-map-ops.h>
#include <linux/idr.h>
#include <linux/init.h>
#include <linux/kdev_t.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "internal.h"

#if PAGE_SIZE != UGDS_DRV_PAGE_SIZE || BITS_PER_LONG != 64
#error "ugds_drv needs a 64-bit kernel with pages of 4 KiB"
#endif

#define MINORS		256
#define REGISTER_BYTES	0x40	/* CAP to the admin queues' */

static struct class *ugds_class;
static dev_t first_number;
static DEFINE_IDA(minors);

static void free_device(struct device *dev)
{
	struct ugds_device *ud = container_of(dev, struct ugds_device, dev);

	kfree(ud);
}

static struct ugds_device *make_device(struct pci_dev *pdev)
{
	struct ugds_device *ud = kzalloc(sizeof(*ud), GFP_KERNEL);

	if (!ud)
		return NULL;
	ud->pdev = pdev;
	ud->minor = -1;
	mutex_init(&ud->lock);
	mutex_init(&ud->command_lock);
	spin_lock_init(&ud->state_lock);
	ud->pci_domain = pci_domain_nr(pdev->bus);
	ud->pci_address = pci_dev_id(pdev);
	device_initialize(&ud->dev);
	ud->dev.class = ugds_class;
	ud->dev.parent = &pdev->dev;
	ud->dev.release = free_device;
	return ud;
}

static int set_mask(struct ugds_device *ud)
{
	struct device *dev = &ud->pdev->dev;
	int ret;

	ret = ugds_fault("probe_mask");
	if (ret)
		return ret;
	ud->dma_bits = 64;
	if (dma_set_mask_and_coherent(dev, DMA_BIT_MASK(64))) {
		ud->dma_bits = 32;
		ret = dma_set_mask_and_coherent(dev, DMA_BIT_MASK(32));
		if (ret)
			return ret;
	}
	/* PRP entries name pages: how long a piece is does not matter. */
	dma_set_max_seg_size(dev, UINT_MAX);
	dma_set_seg_boundary(dev, ULONG_MAX);
	return 0;
}

static int map_registers(struct ugds_device *ud)
{
	int ret;

	ret = ugds_fault("probe_registers");
	if (ret)
		return ret;
	ud->bar_start = pci_resource_start(ud->pdev, 0);
	ud->bar_size = pci_resource_len(ud->pdev, 0);
	if (!(pci_resource_flags(ud->pdev, 0) & IORESOURCE_MEM) ||
	    ud->bar_size < REGISTER_BYTES)
		return -ENODEV;
	ud->registers = ioremap(ud->bar_start, REGISTER_BYTES);
	return ud->registers ? 0 : -ENOMEM;
}

/* What a reset of the bus leaves nothing of. Bus mastering is off in it. */
static int save_state(struct ugds_device *ud)
{
	int ret;

	ret = ugds_fault("probe_state");
	if (!ret)
		ret = pci_save_state(ud->pdev);
	if (ret)
		return ret;
	ud->saved = pci_store_saved_state(ud->pdev);
	return ud->saved ? 0 : -ENOMEM;
}

static int take_minor(struct ugds_device *ud)
{
	int ret;

	ret = ugds_fault("probe_minor");
	if (!ret)
		ret = ida_alloc_max(&minors, MINORS - 1, GFP_KERNEL);
	if (ret < 0)
		return ret;
	ud->minor = ret;
	return 0;
}

static int make_node(struct ugds_device *ud)
{
	int ret;

	ret = ugds_fault("probe_node");
	if (ret)
		return ret;
	ud->dev.devt = first_number + ud->minor;
	ret = dev_set_name(&ud->dev, UGDS_NAME "%d", ud->minor);
	if (ret)
		return ret;
	cdev_init(&ud->cdev, &ugds_fops);
	ud->cdev.owner = THIS_MODULE;
	return cdev_device_add(&ud->cdev, &ud->dev);
}

static int enable(struct ugds_device *ud)
{
	int ret = ugds_fault("probe_enable");

	return ret ? ret : pci_enable_device_mem(ud->pdev);
}

static int take_region(struct ugds_device *ud)
{
	int ret = ugds_fault("probe_region");

	return ret ? ret : pci_request_region(ud->pdev, 0, UGDS_NAME);
}

static void look_at(struct ugds_device *ud)
{
	int vectors = pci_msix_vec_count(ud->pdev);

	ud->msix = max(vectors, 0);
	ud->flr = !pcie_reset_flr(ud->pdev, PCI_RESET_PROBE);
	ud->translated = ugds_is_translated(ud->pdev);
}

static int ugds_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct ugds_device *ud;
	int ret;

	if (pdev->class != PCI_CLASS_STORAGE_EXPRESS)
		return -ENODEV;
	if (!dev_is_dma_coherent(&pdev->dev)) {
		dev_err(&pdev->dev, "its DMA is not coherent with the CPU\n");
		return -EOPNOTSUPP;
	}
	ud = make_device(pdev);
	if (!ud)
		return -ENOMEM;
	ret = enable(ud);
	if (ret)
		goto put;
	pci_clear_master(pdev);
	ret = take_region(ud);
	if (ret)
		goto disable;
	ret = map_registers(ud);
	if (ret)
		goto give_region;
	ret = set_mask(ud);
	if (ret)
		goto unmap;
	look_at(ud);
	ret = save_state(ud);
	if (ret)
		goto unmap;
	ret = take_minor(ud);
	if (ret)
		goto drop_state;
	pci_set_drvdata(pdev, ud);
	ret = make_node(ud);
	if (ret)
		goto give_minor;
	return 0;

give_minor:
	pci_set_drvdata(pdev, NULL);
	ida_free(&minors, ud->minor);
drop_state:
	kfree(ud->saved);
unmap:
	iounmap(ud->registers);
give_region:
	pci_release_region(pdev, 0);
disable:
	pci_disable_device(pdev);
put:
	put_device(&ud->dev);
	return ret;
}

/*
 * The device leaves, or another driver gets it. A file that is open keeps what
 * is ours, and none of what is the device's.
 */
static void ugds_remove(struct pci_dev *pdev)
{
	struct ugds_device *ud = pci_get_drvdata(pdev);
	u64 generation;
	u32 method;

	cdev_device_del(&ud->cdev, &ud->dev);
	mutex_lock(&ud->lock);
	ud->gone = true;
	ugds_wedge(ud, UGDS_DRV_STATE_GONE, UGDS_DRV_REASON_REMOVED);
	if (ud->file)
		ugds_registers_away(ud->file);
	ugds_stop(ud, false, &method, &generation);
	if (ud->file)
		ugds_dismantle(ud->file);
	ud->file = NULL;
	ugds_event_off(ud);
	mutex_unlock(&ud->lock);
	pci_set_drvdata(pdev, NULL);
	ida_free(&minors, ud->minor);
	kfree(ud->saved);
	iounmap(ud->registers);
	pci_release_region(pdev, 0);
	pci_disable_device(pdev);
	put_device(&ud->dev);
}

/*
 * A kexec'd kernel must not be written to by commands of ours. Programs run on
 * for a while, and would reset what is only wedged: so this is final.
 */
static void ugds_shutdown(struct pci_dev *pdev)
{
	ugds_wedge(pci_get_drvdata(pdev), UGDS_DRV_STATE_GONE,
		   UGDS_DRV_REASON_REMOVED);
}

static int ugds_suspend(struct device *dev)
{
	ugds_wedge(dev_get_drvdata(dev), UGDS_DRV_STATE_WEDGED,
		   UGDS_DRV_REASON_SUSPENDED);
	return 0;
}

/* The file stays wedged until its owner resets the controller. */
static int ugds_resume(struct device *dev)
{
	return 0;
}

static DEFINE_SIMPLE_DEV_PM_OPS(ugds_pm_ops, ugds_suspend, ugds_resume);

static void ugds_reset_prepare(struct pci_dev *pdev)
{
	struct ugds_device *ud = pci_get_drvdata(pdev);

	/* No reset of ours comes in between, and no opening. */
	mutex_lock(&ud->lock);
	ugds_wedge(ud, UGDS_DRV_STATE_WEDGED, UGDS_DRV_REASON_SYSTEM_RESET);
}

static void ugds_reset_done(struct pci_dev *pdev)
{
	struct ugds_device *ud = pci_get_drvdata(pdev);

	mutex_unlock(&ud->lock);
}

static pci_ers_result_t ugds_error_detected(struct pci_dev *pdev,
					    pci_channel_state_t state)
{
	struct ugds_device *ud = pci_get_drvdata(pdev);

	ugds_wedge(ud, UGDS_DRV_STATE_WEDGED, UGDS_DRV_REASON_PCI_ERROR);
	return state == pci_channel_io_perm_failure ?
	       PCI_ERS_RESULT_DISCONNECT : PCI_ERS_RESULT_NEED_RESET;
}

static pci_ers_result_t ugds_slot_reset(struct pci_dev *pdev)
{
	struct ugds_device *ud = pci_get_drvdata(pdev);

	/*
	 * The PCI core keeps none for us: older kernels save it for a driver's
	 * call alone, and each restoring uses it up.
	 */
	pci_load_saved_state(pdev, ud->saved);
	pci_restore_state(pdev);
	/* Whatever was restored: nothing moves until the owner's reset. */
	ugds_wedge(ud, UGDS_DRV_STATE_WEDGED, UGDS_DRV_REASON_PCI_ERROR);
	return PCI_ERS_RESULT_RECOVERED;
}

static const struct pci_error_handlers ugds_error_handlers = {
	.error_detected = ugds_error_detected,
	.slot_reset = ugds_slot_reset,
	.reset_prepare = ugds_reset_prepare,
	.reset_done = ugds_reset_done,
};

static struct pci_driver ugds_driver = {
	.name = UGDS_NAME,
	.probe = ugds_probe,
	.remove = ugds_remove,
	.shutdown = ugds_shutdown,
	.err_handler = &ugds_error_handlers,
	.driver.pm = pm_sleep_ptr(&ugds_pm_ops),
};

static int __init ugds_init(void)
{
	int ret;

	ret = alloc_chrdev_region(&first_number, 0, MINORS, UGDS_NAME);
	if (ret)
		return ret;
	ugds_class = ugds_class_create(UGDS_NAME);
	if (IS_ERR(ugds_class)) {
		ret = PTR_ERR(ugds_class);
		goto give_numbers;
	}
	ret = pci_register_driver(&ugds_driver);
	if (ret)
		goto destroy_class;
	return 0;

destroy_class:
	class_destroy(ugds_class);
give_numbers:
	unregister_chrdev_region(first_number, MINORS);
	return ret;
}

static void __exit ugds_exit(void)
{
	pci_unregister_driver(&ugds_driver);
	class_destroy(ugds_class);
	unregister_chrdev_region(first_number, MINORS);
	ida_destroy(&minors);
}

module_init(ugds_init);
module_exit(ugds_exit);

MODULE_DESCRIPTION("uGDS: sets up NVMe controllers for user space");
MODULE_AUTHOR("uGDS");
MODULE_LICENSE("GPL");
